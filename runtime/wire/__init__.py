"""What a runtime and its clients exchange over HTTP: every record once, and how records are written and read as JSON.

Server, client, terminal UI and the tests' fakes all use these. Importing them is cheap: the UI process does.
"""
