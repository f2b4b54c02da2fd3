"""Groups of instances of one model: where a request goes, which requests migrate, when instances merge into pipelines."""
