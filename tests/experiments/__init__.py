"""What the documentation claims of alarms and of interventions, tried on small trainings that learn in seconds."""
