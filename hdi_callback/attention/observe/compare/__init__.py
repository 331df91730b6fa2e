"""What attention received in a real forward, compared with what linear maps gave."""
