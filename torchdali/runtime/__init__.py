"""This process and its devices: exits, forks, threads, CUDA."""
