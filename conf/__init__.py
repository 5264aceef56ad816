"""The config groups of the recipes: one folder a group, one YAML an option."""
