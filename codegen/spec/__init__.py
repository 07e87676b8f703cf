"""What a YAML file may say, and what a spec is."""
