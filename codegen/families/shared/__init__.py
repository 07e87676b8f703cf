"""What more than one family lowers with."""
