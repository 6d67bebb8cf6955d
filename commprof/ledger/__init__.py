"""The ledger of a run: what was requested, issued, executed and moved, and whether these four levels agree."""
