"""Groups of instances of one model: where a request goes, when instances merge into pipelines, who moves."""
