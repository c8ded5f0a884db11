"""The convergence bound of deep-unfolded weights, worked out for one run.

The theorem is about w^(t+1) = w^(t) − η τ_eff^(t) Σ_k Θ_k^(t) d_k^(t), where d_k is the mean of client k's
stochastic gradients weighted by a_k, and about f = Σ_k θ_k f_k with θ_k = mean_t Θ_k^(t). It derives

    (1/T) Σ_t E‖∇f(w^(t))‖² ≤ 4 (f(w^(0)) − f_inf) / (T τ_eff η)      start
                            + 4 η L σ² Ã / K                          noise
                            + 10 η² L² σ² B̃                           local noise
                            + 20 η² L² κ² C̃                           dissimilarity
                            + 4 · 2^K (σ² + G²) Σ_k V_k               varying weights

for L-smooth f_k, gradient noise of variance ≤ σ², E‖∇ℓ‖² ≤ G² and Σ_k ω_k‖∇f_k‖² ≤ β²‖Σ_k ω_k ∇f_k‖² + κ².
Two factors got lost on the way to the published Ã and B̃. They are restored here; the published values are
given beside them.

Reference: Nakai-Kasai and Wadayama, deep unfolding-based weighted averaging, Theorem 1 and its appendix.
"""
