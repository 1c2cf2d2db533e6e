//! What a tier may promise of a step that it has acknowledged.

/// What an acknowledged step survives (rule 11).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// A loss of power, and whatever ends the operating system: what is acknowledged is synced.
    #[default]
    PowerLoss,
    /// The end of the process, `kill -9` included: what is acknowledged is with the operating system.
    /// A loss of power may take the last steps.
    KilledProcess,
}
