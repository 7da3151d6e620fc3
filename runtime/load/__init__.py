"""From a stored model to a loaded one: backend, memory plan, opening; and prospects of models not fetched yet."""
