"""What one does with whole experiments, from Python or from the command line.

::

    from dpfl.experiments.describe import describe      # pipeline, promise, costs; nothing is run
    from dpfl.experiments.plan import plan              # several methods before training
    from dpfl.experiments.compare import compare, sweep, tune, run_study
    from dpfl.experiments.private_search import private_search   # tuning with a privacy cost

Every function returns frozen dataclasses; ``to_dict`` makes the document that ``--json`` prints.
"""
