"""Mixtures of experts: the layer, its gate, the exchange of tokens, and the groups of ranks (ZeRO 0 to 2)."""
