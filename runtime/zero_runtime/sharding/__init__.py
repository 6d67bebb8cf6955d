"""ZeRO stage 3: sharded parameters, gathered only while a module uses them."""
