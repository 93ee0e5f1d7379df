"""Federated nearest-neighbour translation: FedNN, encrypted datastores, adaptive kNN-MT."""
