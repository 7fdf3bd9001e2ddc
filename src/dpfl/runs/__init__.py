"""Runs as files: what describes one, what it leaves behind, and what it ended with.

``experiment``  an experiment as TOML, complete and re-runnable; ``sections`` has its tables
``deployment``  a study between real sites; ``site_file`` a site's own file
``folder``      the run folder: ledger, record, results, and the state to go on from
``result``      the summary of a run, typed from the loop to the report
``loggers``     TensorBoard and MLflow, where they are installed
``processes``   processes that end with their parent, and Ctrl-C that is held back
"""
