"""The service: the loaded model, its state, and the thread that runs it."""
