"""Model selection: hyperparameter searches and cross-validation; the caller says what is trained and how."""
