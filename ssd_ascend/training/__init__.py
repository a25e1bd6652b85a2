"""Makes EAGLE-3 heads: text, features, training, evaluation, export. Used by the door `train`."""
