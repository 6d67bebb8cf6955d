"""One module per verb of the command line: the module's name is the verb's, its function of the same name runs it.

``import_`` is the verb ``import``, which is a keyword of Python. ``HELP_ORDER`` is the verb's place on the page of
``commprof --help``; in tens, so that a verb fits between two others.
"""
