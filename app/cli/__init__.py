"""The command line: one module for each verb. Nothing heavy is imported before a verb needs it."""
