"""Mixtures of experts: the layer, its gate, the exchange of tokens, and the groups of ranks (ZeRO stages 0 to 2)."""
