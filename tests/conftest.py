"""The BLAS is one choice per process and must be made before anything imports mlx: DRAFTWIRE_BLAS says which."""

from draftwire.blas import load_blas_from_env

load_blas_from_env()
