//! The gradients of published networks and of a file, front layer first. Pure, except for reading
//! the file.
//!
//! The lists follow the rules of the architectures. A test compares them with the published numbers
//! of parameters and tensors:
//!
//! - ResNet-50: He et al., CVPR 2016, as torchvision has it (stride in the 3×3 convolution)
//! - VGG-16 (configuration D): Simonyan and Zisserman, ICLR 2015
//! - BERT large, uncased: Devlin et al., NAACL 2019, as Hugging Face's `BertModel`, with pooler
//! - GPT-2 small: Radford et al., 2019; the output layer shares the embedding's weights

use std::{collections::BTreeSet, path::Path};

use gradwire_launcher::error::CommandError;

/// A gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gradient {
    /// Its name in the network.
    pub name: String,
    /// Its dimensions, outermost first.
    pub dims: Vec<u64>,
}

impl Gradient {
    /// The number of its elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// The largest number of tensors in a file.
const MAX_TENSORS: usize = 1 << 20;

/// The largest number of elements in a network.
const MAX_ELEMENTS: u64 = 1 << 48;

/// The name of a known network, and the function that returns its gradients.
type Known = (&'static str, fn() -> Vec<Gradient>);

/// All known networks.
const KNOWN: [Known; 4] =
    [("resnet50", resnet50), ("vgg16", vgg16), ("bert-large", bert_large), ("gpt2", gpt2)];

/// The gradients of a known network or of a file, front layer first. `option` is the option's name.
///
/// # Errors
/// [`CommandError`] with the option, the file, the line and the error.
pub fn load(option: &str, name: &str) -> Result<Vec<Gradient>, CommandError> {
    if let Some((_, network)) = KNOWN.iter().find(|(known, _)| *known == name) {
        return Ok(network());
    }
    let text = std::fs::read_to_string(Path::new(name)).map_err(|error| {
        let known: Vec<_> = KNOWN.iter().map(|(known, _)| *known).collect();
        CommandError::usage(format!("{option} {name}: {error}"))
            .hint(format!("it must be {} or an existing file", known.join(", ")))
    })?;
    parse(&text).map_err(|wrong| {
        CommandError::usage(format!("{option} {name} {wrong}"))
            .hint("lines must be `name dim dim …`, front layer first; # begins a comment")
    })
}

/// Parses `name dim dim …` in each line. A line without dimensions is a single number.
fn parse(text: &str) -> Result<Vec<Gradient>, String> {
    let (mut gradients, mut names, mut all) = (Vec::new(), BTreeSet::new(), 0_u64);
    for (i, line) in text.lines().enumerate() {
        let at = |wrong: String| format!("line {}: {wrong}", i + 1);
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(name) = words.next() else { continue };
        let dims = words
            .map(|word| {
                let dim = word.parse().ok().filter(|dim| *dim > 0);
                dim.ok_or_else(|| at(format!("'{word}' is not a dimension")))
            })
            .collect::<Result<Vec<u64>, _>>()?;
        let elements = dims.iter().try_fold(1_u64, |all, dim| all.checked_mul(*dim));
        let sum = elements.and_then(|elements| all.checked_add(elements));
        all = sum
            .filter(|sum| *sum <= MAX_ELEMENTS)
            .ok_or_else(|| at("more than 2^48 elements in total".to_owned()))?;
        if !names.insert(name) {
            return Err(at(format!("duplicate name '{name}'")));
        }
        if gradients.len() == MAX_TENSORS {
            return Err(at(format!("more than {MAX_TENSORS} tensors")));
        }
        gradients.push(Gradient { name: name.to_owned(), dims });
    }
    if gradients.is_empty() { Err("has no tensors".to_owned()) } else { Ok(gradients) }
}

/// Collects gradients with their names.
#[derive(Debug, Default)]
struct Network(Vec<Gradient>);

impl Network {
    fn add(&mut self, name: &str, dims: &[u64]) {
        self.0.push(Gradient { name: name.to_owned(), dims: dims.to_owned() });
    }

    /// Adds a weight, with one bias for each output.
    fn layer(&mut self, name: &str, weight: &[u64], outputs: u64) {
        self.add(&format!("{name}.weight"), weight);
        self.add(&format!("{name}.bias"), &[outputs]);
    }

    /// Adds a scale and a shift, with `width` numbers each.
    fn norm(&mut self, name: &str, width: u64) {
        self.layer(name, &[width], width);
    }

    fn dense(&mut self, name: &str, outputs: u64, inputs: u64) {
        self.layer(name, &[outputs, inputs], outputs);
    }
}

fn resnet50() -> Vec<Gradient> {
    let mut net = Network::default();
    net.add("conv1.weight", &[64, 3, 7, 7]);
    net.norm("bn1", 64);
    let mut inputs = 64;
    for (stage, (blocks, width)) in [(3, 64), (4, 128), (6, 256), (3, 512)].into_iter().enumerate()
    {
        let outputs = 4 * width;
        for block in 0..blocks {
            let name = format!("layer{}.{block}", stage + 1);
            let convolutions = [[width, inputs, 1], [width, width, 3], [outputs, width, 1]];
            for (i, [to, from, kernel]) in convolutions.into_iter().enumerate() {
                net.add(&format!("{name}.conv{}.weight", i + 1), &[to, from, kernel, kernel]);
                net.norm(&format!("{name}.bn{}", i + 1), to);
            }
            if block == 0 {
                net.add(&format!("{name}.downsample.0.weight"), &[outputs, inputs, 1, 1]);
                net.norm(&format!("{name}.downsample.1"), outputs);
            }
            inputs = outputs;
        }
    }
    net.dense("fc", 1000, 2048);
    net.0
}

fn vgg16() -> Vec<Gradient> {
    let mut net = Network::default();
    // The position of each convolution among its activations and poolings in torchvision's list.
    let convolutions = [
        (0, 64),
        (2, 64),
        (5, 128),
        (7, 128),
        (10, 256),
        (12, 256),
        (14, 256),
        (17, 512),
        (19, 512),
        (21, 512),
        (24, 512),
        (26, 512),
        (28, 512),
    ];
    let mut inputs = 3;
    for (index, outputs) in convolutions {
        net.layer(&format!("features.{index}"), &[outputs, inputs, 3, 3], outputs);
        inputs = outputs;
    }
    for (index, outputs, inputs) in [(0, 4096, 512 * 7 * 7), (3, 4096, 4096), (6, 1000, 4096)] {
        net.dense(&format!("classifier.{index}"), outputs, inputs);
    }
    net.0
}

fn bert_large() -> Vec<Gradient> {
    let (hidden, inner) = (1024, 4096);
    let mut net = Network::default();
    for (table, rows) in [("word", 30522), ("position", 512), ("token_type", 2)] {
        net.add(&format!("embeddings.{table}_embeddings.weight"), &[rows, hidden]);
    }
    net.norm("embeddings.LayerNorm", hidden);
    for layer in 0..24 {
        let name = format!("encoder.layer.{layer}");
        for part in ["self.query", "self.key", "self.value", "output.dense"] {
            net.dense(&format!("{name}.attention.{part}"), hidden, hidden);
        }
        net.norm(&format!("{name}.attention.output.LayerNorm"), hidden);
        net.dense(&format!("{name}.intermediate.dense"), inner, hidden);
        net.dense(&format!("{name}.output.dense"), hidden, inner);
        net.norm(&format!("{name}.output.LayerNorm"), hidden);
    }
    net.dense("pooler.dense", hidden, hidden);
    net.0
}

fn gpt2() -> Vec<Gradient> {
    let width = 768;
    let mut net = Network::default();
    net.add("wte.weight", &[50257, width]);
    net.add("wpe.weight", &[1024, width]);
    for layer in 0..12 {
        let name = format!("h.{layer}");
        // The first dimension is the input.
        let parts = [
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ];
        for (i, (part, inputs, outputs)) in parts.into_iter().enumerate() {
            if i % 2 == 0 {
                net.norm(&format!("{name}.ln_{}", i / 2 + 1), width);
            }
            net.layer(&format!("{name}.{part}"), &[inputs, outputs], outputs);
        }
    }
    net.norm("ln_f", width);
    net.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_have_the_published_parameters() {
        for (name, tensors, parameters) in [
            ("resnet50", 161, 25_557_032),
            ("vgg16", 32, 138_357_544),
            ("bert-large", 391, 335_141_888),
            ("gpt2", 148, 124_439_808),
        ] {
            let gradients = load("--shapes", name).unwrap();
            let all: u64 = gradients.iter().map(Gradient::elements).sum();
            assert_eq!((gradients.len(), all), (tensors, parameters), "{name}");
            let names: BTreeSet<_> = gradients.iter().map(|gradient| &gradient.name).collect();
            assert_eq!(names.len(), tensors, "{name} has a duplicate name");
        }
    }

    #[test]
    fn a_file_lists_gradients_in_lines() {
        let gradients = parse("# front\nconv.weight 64 3 7 7\n\nscale # one number\n").unwrap();
        assert_eq!((gradients[0].elements(), gradients[1].elements()), (9408, 1));
        for (text, expected) in [
            ("", "has no tensors"),
            ("a 2\nb x", "line 2: 'x' is not a dimension"),
            ("a 0", "line 1: '0' is not a dimension"),
            ("a 2\na 3", "line 2: duplicate name 'a'"),
            ("a 18446744073709551615 2", "line 1: more than 2^48"),
            ("a 281474976710656\nb 1", "line 2: more than 2^48"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let error = load("--shapes", "no/such/file").unwrap_err();
        assert!(error.hint.contains("resnet50") && error.what.contains("no/such/file"), "{error}");
    }
}
