"""From YAML to a checked experiment."""
