"""Sentence-private document embeddings: DeepCandidate and what came after it."""
