"""Wire records: the data that a runtime and its clients exchange over HTTP, and their JSON form.

Server, client, terminal UI and test fakes all use these. Cheap to import, as the UI process must be.
"""
