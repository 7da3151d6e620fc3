"""Loading of stored models: backend choice, memory plan, opening; and predictions for models not downloaded yet."""
