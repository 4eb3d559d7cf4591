// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Loss of frames: a given fraction, by a seed, so that the same frames are lost each time.

/// Decides which frames are lost.
pub struct Loss {
    fraction: f64,
    random: fastrand::Rng,
}

impl Loss {
    /// Loses a fraction (0 to 1) of frames.
    pub fn new(fraction: f64, seed: u64) -> Self {
        Self {
            fraction,
            random: fastrand::Rng::with_seed(seed),
        }
    }

    /// Whether the next frame is lost.
    pub fn next_is_lost(&mut self) -> bool {
        self.fraction > 0.0 && self.random.f64() < self.fraction
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(fraction: f64, seed: u64) -> Vec<usize> {
        let mut loss = Loss::new(fraction, seed);
        (0..10_000).filter(|_| loss.next_is_lost()).collect()
    }

    #[test]
    fn as_many_as_wanted_and_the_same_each_time() {
        assert!(lost(0.0, 1).is_empty());
        assert_eq!(lost(1.0, 1).len(), 10_000);
        let one = lost(0.01, 1);
        assert!((60..140).contains(&one.len()), "{}", one.len());
        assert_eq!(one, lost(0.01, 1));
        assert_ne!(one, lost(0.01, 2));
    }
}
