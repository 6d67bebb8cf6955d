"""The two binary files of a rank: written during training, decoded into tables afterwards."""
