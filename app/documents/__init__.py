"""Documents: files and folders that a chat is given, read in a child process, and searched where they are too long."""
