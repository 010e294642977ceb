"""Tree speculative verification of Gated DeltaNet models as a ``torch.compile`` backend."""
