"""System interfaces: child processes, host names, private files, untrusted text."""
