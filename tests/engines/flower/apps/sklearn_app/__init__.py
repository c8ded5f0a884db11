"""An app in scikit-learn: a logistic regression, its coefficients as the arrays that are sent."""
