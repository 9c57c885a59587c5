"""Proofs about families of Hugging Face models: split over ranks, and trained further."""
