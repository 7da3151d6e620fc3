"""Store-backed parts of the service: catalogue, loader, workshop, and inspection of the machine."""
