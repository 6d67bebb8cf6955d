"""Adapters for frameworks that do not call commprof's hooks: they report purposes, steps and buckets for them."""
