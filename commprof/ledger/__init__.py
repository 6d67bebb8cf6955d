"""The ledger of a run: reconciles the requested, issued, executed and moved communication."""
