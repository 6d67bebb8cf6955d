"""Predict the messages and the memory of a training job before it runs, for one or many settings of its config.

=================== ==========================================================================
``models``          the parameters of a model: from its size, a function, or a transformers config
``predictions``     messages, memory and offload of one setting, by the rules of ``commprof.requested``
``hosts``           how ranks share hosts, the bytes between hosts, and the rates of links
``rank_classes``    ranks with equal traffic, and the minimum, mean and maximum over ranks
``traffic``         the messages per purpose and operation, with sizes and bytes per rank and host
``blocks``          the blocks of a model, and gathering each as one unit at stage 3
``overlap``         which messages can be under way during computation
``nccl_model``      the time of a collective according to NCCL's model
``durations``       the time of all messages, and the bounds of a step
``latency``         whether messages are latency bound, by a calibration or by NCCL's model
``memory``          activations, and the peak memory of a rank
``options``         the options of the command, which are also the fields of the Plan page
``keys``            the keys of a config that can change the prediction
``recommendations`` which of several settings to use, and why
``api``             the functions that the command line and the dashboard call
=================== ==========================================================================
"""
