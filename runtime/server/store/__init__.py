"""The service's parts backed by the store: catalogue, loader, workshop, and the machine they run on."""
