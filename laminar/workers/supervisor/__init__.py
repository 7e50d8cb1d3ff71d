"""What `laminar run` needs around its workers: etcd, processes that are started again, a store made ready."""
