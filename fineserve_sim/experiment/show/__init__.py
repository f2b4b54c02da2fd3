"""Results for people: tables, figures, lives of requests."""
