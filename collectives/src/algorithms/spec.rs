//! A spec: an algorithm with its parameters, as users write it and as it is sent.
//!
//! ```text
//! ring
//! circulant(radix=4)
//! torus(dims=4x8)
//! direct(chunk=64K)
//! ```
//!
//! [`CHUNK`] is a parameter of every algorithm: the schedule is the same, but runs in chunks of
//! this size.
//!
//! A parameter that is not given has its default. Defaults are not printed, so two specs are the
//! same if they print the same.

use std::fmt;

use super::name::{Algorithm, FACTORS, Parameter, Values};
use crate::bytes;

/// The longest text of a spec, in bytes (BOUND).
pub const MAX_SPEC: usize = 80;

/// The most parameters of an algorithm.
const PARAMETERS: usize = 3;

/// The parameter that every algorithm has besides its own.
pub const CHUNK: Parameter = Parameter {
    name: "chunk",
    about: "how much is received, reduced and sent on at a time; by default as set or tuned",
    values: Values::Bytes { least: 4 << 10, most: 4 << 20 },
};

/// An algorithm with its parameters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spec {
    algorithm: Algorithm,
    /// The value of each parameter: a number, or the index of a word.
    numbers: [u32; PARAMETERS],
    /// 0 where there is none.
    factors: [u32; FACTORS],
    /// In bytes; 0 if it isn't given.
    chunk: u32,
}

/// Why a text is not a spec.
#[expect(missing_docs, reason = "the texts explain the fields")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No algorithm has this name.
    #[error("unknown algorithm {given:?}; use one of {}", names().join(", "))]
    Unknown { given: String },
    /// The text does not have the form of a spec.
    #[error("{given:?} is not of the form name(parameter=value, …)")]
    Form { given: String },
    /// The algorithm has no such parameter.
    #[error("{algorithm} has no parameter {given:?}; {}", accepted(*algorithm))]
    Parameter { algorithm: Algorithm, given: String },
    /// A parameter is given twice.
    #[error("{algorithm}: {name} is given twice")]
    Twice { algorithm: Algorithm, name: &'static str },
    /// A parameter has an invalid value.
    #[error("{algorithm}: {name}={given} is not possible; {name} is {values}")]
    Value { algorithm: Algorithm, name: &'static str, given: String, values: Values },
    /// The factors are for another number of nodes.
    #[error("{spec} is for {product} nodes, and there are {nodes}; {}", other(spec, *nodes))]
    Nodes { spec: Spec, product: u64, nodes: u32 },
}

fn names() -> Vec<&'static str> {
    Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect()
}

fn accepted(algorithm: Algorithm) -> String {
    let all = algorithm.parameters().iter().chain([&CHUNK]);
    let names: Vec<&str> = all.map(|parameter| parameter.name).collect();
    format!("it has {}", names.join(" and "))
}

/// A suggestion in place of factors for another number of nodes.
fn other(spec: &Spec, nodes: u32) -> String {
    let usual = Spec::usual(spec.algorithm);
    match (2..=nodes.isqrt()).rev().find(|factor| nodes.is_multiple_of(*factor)) {
        Some(smaller) => {
            format!("use dims whose product is {nodes}, such as {}x{smaller}", nodes / smaller)
        }
        None => format!("{nodes} nodes don't form a grid: use {usual} without dims"),
    }
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_SPEC).collect()
}

impl Spec {
    /// An algorithm with its default parameters.
    pub fn usual(algorithm: Algorithm) -> Self {
        let (numbers, factors) = ([0; PARAMETERS], [0; FACTORS]);
        let mut spec = Self { algorithm, numbers, factors, chunk: 0 };
        for (number, parameter) in spec.numbers.iter_mut().zip(algorithm.parameters()) {
            if let Values::Number { usual, .. } = parameter.values {
                *number = usual;
            }
        }
        spec
    }

    /// The algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The bytes of its chunks, if they are given.
    pub fn chunk(&self) -> Option<u64> {
        (self.chunk > 0).then_some(self.chunk.into())
    }

    /// Reads a spec; the algorithm may be an alias ([`ALIASES`](super::ALIASES)). Case and spaces
    /// are ignored, and `_` is read as `-`.
    ///
    /// # Errors
    /// [`SpecError`] says what is wrong and what is accepted.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let form = || SpecError::Form { given: cut(text) };
        let plain: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let plain = plain.to_ascii_lowercase().replace('_', "-");
        let (name, parameters) = match plain.split_once('(') {
            None => (&plain[..], None),
            Some((name, rest)) => (name, Some(rest.strip_suffix(')').ok_or_else(form)?)),
        };
        let unknown = || SpecError::Unknown { given: cut(name) };
        let algorithm = Algorithm::named(name).ok_or_else(unknown)?;
        let mut spec = Self::usual(algorithm);
        // The last one is the chunk.
        let mut given = [false; PARAMETERS + 1];
        for one in parameters.iter().flat_map(|all| all.split(',')) {
            let (name, value) = one.split_once('=').ok_or_else(form)?;
            let own = (0..).zip(algorithm.parameters());
            let mut all = own.chain([(PARAMETERS, &CHUNK)]);
            let Some((at, parameter)) = all.find(|(_, parameter)| parameter.name == name) else {
                return Err(SpecError::Parameter { algorithm, given: cut(name) });
            };
            let Parameter { name, values, .. } = *parameter;
            if std::mem::replace(&mut given[at], true) {
                return Err(SpecError::Twice { algorithm, name });
            }
            spec.set(at, values, value).ok_or_else(|| SpecError::Value {
                algorithm,
                name,
                given: cut(value),
                values,
            })?;
        }
        Ok(spec)
    }

    fn set(&mut self, at: usize, values: Values, value: &str) -> Option<()> {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse::<u32>().ok()).flatten()
        };
        match values {
            Values::Number { least, most, .. } => {
                let number = number(value).filter(|number| (least..=most).contains(number))?;
                self.numbers[at] = number;
            }
            Values::Word(words) => {
                self.numbers[at] = words.iter().position(|word| *word == value)? as u32;
            }
            Values::Factors(most) => {
                let factors: Vec<u32> = value.split('x').map(number).collect::<Option<_>>()?;
                let fits = (2..=most).contains(&factors.len()) && factors.iter().all(|f| *f >= 2);
                if !fits {
                    return None;
                }
                self.factors[..factors.len()].copy_from_slice(&factors);
            }
            Values::Bytes { least, most } => {
                let bytes = u32::try_from(bytes::parse(value)?).ok()?;
                self.chunk = (least..=most).contains(&bytes).then_some(bytes)?;
            }
        }
        Some(())
    }

    /// Whether it can run on this number of nodes.
    ///
    /// # Errors
    /// [`SpecError::Nodes`] if its factors are for another number.
    pub fn fits(&self, nodes: u32) -> Result<(), SpecError> {
        match self.factors() {
            Some(factors) => {
                let times = |product: u64, &factor: &u32| product.saturating_mul(factor.into());
                let product = factors.iter().fold(1, times);
                let error = SpecError::Nodes { spec: *self, product, nodes };
                if product == u64::from(nodes) { Ok(()) } else { Err(error) }
            }
            None => Ok(()),
        }
    }

    /// The value of a parameter: its number, or the index of its word.
    pub(super) fn number(&self, name: &str) -> u32 {
        let all = self.algorithm.parameters();
        let at = all.iter().position(|parameter| parameter.name == name);
        debug_assert!(at.is_some(), "{} has no parameter {name}", self.algorithm);
        at.map_or(0, |at| self.numbers[at])
    }

    /// The least number of segments into which the data on one path is cut; 1 for algorithms
    /// without this parameter.
    pub(super) fn segments(&self) -> u32 {
        let has_it = self.algorithm.parameters().iter().any(|one| one.name == "segments");
        if has_it { self.number("segments") } else { 1 }
    }

    /// The factors, if they are given.
    pub(super) fn factors(&self) -> Option<&[u32]> {
        let many = self.factors.iter().position(|&factor| factor == 0).unwrap_or(FACTORS);
        (many > 0).then(|| &self.factors[..many])
    }
}

impl From<Algorithm> for Spec {
    fn from(algorithm: Algorithm) -> Self {
        Self::usual(algorithm)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut given = Vec::new();
        for (&number, Parameter { name, values, .. }) in
            self.numbers.iter().zip(self.algorithm.parameters())
        {
            match values {
                Values::Number { usual, .. } if number != *usual => {
                    given.push(format!("{name}={number}"));
                }
                Values::Word(words) if number != 0 => {
                    given.push(format!("{name}={}", words[number as usize]));
                }
                Values::Factors(_) => given.extend(self.factors().map(|factors| {
                    let factors: Vec<String> = factors.iter().map(u32::to_string).collect();
                    format!("{name}={}", factors.join("x"))
                })),
                Values::Number { .. } | Values::Word(_) | Values::Bytes { .. } => {}
            }
        }
        given.extend(self.chunk().map(|chunk| format!("{}={}", CHUNK.name, bytes::written(chunk))));
        f.write_str(self.algorithm.name())?;
        if given.is_empty() { Ok(()) } else { write!(f, "({})", given.join(",")) }
    }
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        match Spec::parse(text) {
            Ok(spec) => spec.to_string(),
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn printed_specs_can_be_read_again() {
        for (text, printed) in [
            ("ring", "ring"),
            (" Recursive_Doubling ", "recursive-doubling"),
            ("ring(way=around)", "ring(way=around)"),
            ("ring(way=back)", "ring"),
            ("circulant(radix=2)", "circulant"),
            ("Circulant( radix = 4 )", "circulant(radix=4)"),
            ("k-nomial(radix=64)", "k-nomial(radix=64)"),
            ("torus(dims=4x8)", "torus(dims=4x8)"),
            ("2D-torus(dims=4x8)", "torus(dims=4x8)"),
            ("PLink", "hierarchical"),
            ("PHub(across=ring)", "parameterhub(across=ring)"),
            ("blueconnect(dims=2x3x4x5)", "blueconnect(dims=2x3x4x5)"),
            ("direct(chunk=65536)", "direct(chunk=64K)"),
            ("Torus(Chunk=1 MiB, dims=2x2)", "torus(dims=2x2,chunk=1M)"),
            ("servers(chunk=5000)", "servers(chunk=5000)"),
        ] {
            assert_eq!(parsed(text), printed, "{text}");
            assert_eq!(parsed(printed), printed);
            assert!(printed.len() <= MAX_SPEC);
        }
        for &algorithm in Algorithm::ALL {
            assert_eq!(Spec::parse(algorithm.name()), Ok(Spec::usual(algorithm)));
            assert!(algorithm.parameters().len() <= PARAMETERS);
        }
    }

    /// TRUST: an invalid text is refused with what is accepted.
    #[test]
    fn errors_say_what_is_accepted() {
        for (text, expected) in [
            ("rign", "recursive-doubling"),
            ("", "unknown algorithm \"\""),
            ("ring(", "is not of the form"),
            ("circulant(radix)", "is not of the form"),
            ("circulant()", "is not of the form"),
            ("circulant(radix=1)", "radix is a number from 2 to"),
            ("circulant(radix=+4)", "radix=+4 is not possible"),
            ("circulant(radix=4,radix=4)", "radix is given twice"),
            ("circulant(radix=99999999999)", "is not possible"),
            ("ring(radix=4)", "ring has no parameter \"radix\"; it has way and segments and chunk"),
            ("recursive-doubling(radix=4)", "it has chunk"),
            ("direct(chunk=4095)", "chunk=4095 is not possible; chunk is 4K to 4M"),
            ("direct(chunk=5M)", "chunk is 4K to 4M"),
            ("direct(chunk=)", "chunk= is not possible"),
            ("direct(chunk=64K,chunk=64K)", "chunk is given twice"),
            ("direct(chunk=99999999999999999999G)", "is not possible"),
            ("ring(way=up)", "way is back or around"),
            ("torus(dims=4)", "two numbers of at least 2"),
            ("torus(dims=2x2x2)", "two numbers of at least 2"),
            ("blueconnect(dims=1x4)", "dims=1x4 is not possible"),
            ("blueconnect(dims=2x2x2x2x2x2x2x2x2x2x2x2x2)", "2 to 12 numbers"),
        ] {
            let error = parsed(text);
            assert!(error.starts_with("error: ") && error.contains(expected), "{text}: {error}");
        }
        let long = "x".repeat(10_000);
        assert!(parsed(&long).len() < 1000);
        assert!(parsed(&format!("ring({long}=3)")).len() < 1000);
    }

    #[test]
    fn factors_must_match_the_nodes() {
        let torus = Spec::parse("torus(dims=2x4)").unwrap();
        assert_eq!(torus.fits(8), Ok(()));
        let error = torus.fits(6).unwrap_err().to_string();
        let said = "torus(dims=2x4) is for 8 nodes, and there are 6; use dims whose product is 6, \
                    such as 3x2";
        assert_eq!(error, said);
        let error = torus.fits(7).unwrap_err().to_string();
        assert!(error.ends_with("7 nodes don't form a grid: use torus without dims"), "{error}");
        assert_eq!(Spec::parse("torus").unwrap().fits(7), Ok(()));
        // BOUND: a product larger than any number of nodes.
        let huge = Spec::parse("blueconnect(dims=65536x65536x65536x65536)").unwrap();
        assert!((0..=4096).all(|nodes| huge.fits(nodes).is_err()));
        let many = Spec::parse("hips(dims=2x2x2x2x2x2x2x2x2x2x2x2)").unwrap();
        assert_eq!(many.fits(4096), Ok(()));
    }
}
