"""The user interfaces: command line, terminal UI, settings, and the client of the runtime's HTTP interface."""
