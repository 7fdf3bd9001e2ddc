"""Records, partitions and federations.

``records``     a client's training and test records, stored small and shared between clients
``inputs``      how a stored record becomes a model's input, by public constants only
``partition``   laws by which one data set is shared out among clients
``federation``  clients with their records, budgets and settings
``arrays``      checks of arrays that users bring
``tables``      users' own CSV and Parquet files
``cells``       cells of tables, whatever kind of table it is
``columns``     how a column becomes features by public constants
``schema``      columns by name, the target, and whose records they are
``persons``     the records of one person as one unit
``sources``     tables with a column of clients, sparse and memory-mapped arrays
``loaders``     torch datasets, loaders and iterables
``building``    federations from all of these
"""
