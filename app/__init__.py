"""What a person touches: command line, terminal screens, settings and the client of the runtime's HTTP interface."""
