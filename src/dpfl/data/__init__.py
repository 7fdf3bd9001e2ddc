"""Records, partitions and federations.

``records``     a client's training and test records, stored small and shared between clients
``inputs``      how a stored record becomes a model's input, by public constants only
``partition``   laws by which one data set is shared out among clients
``federation``  clients with their records, budgets and settings
``arrays``      checks of arrays that users bring
``tables``      users' own CSV and Parquet files
"""
