"""What a spec, its plan and its kernel cost and do, told without a GPU."""
