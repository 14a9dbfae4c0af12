"""Semi-supervised federated learning with the labels at the server."""
