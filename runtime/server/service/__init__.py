"""The service: the one loaded model, its state, and the thread that runs it."""
