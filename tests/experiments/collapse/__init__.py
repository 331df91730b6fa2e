"""Small trainings that stay healthy or are made to collapse, and what alerts and interventions do about them."""
