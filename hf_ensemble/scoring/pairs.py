from .likelihoods import Pair as Pair
