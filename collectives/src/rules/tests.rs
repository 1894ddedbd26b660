use super::*;

const BROADCAST: Kind = Kind::Broadcast { root: 0 };

fn parsed(text: &str) -> String {
    match Rules::parse(text) {
        Ok(rules) => rules.to_string(),
        Err(error) => format!("error: {error}"),
    }
}

fn names(text: &str, kind: Kind, bytes: u64) -> (usize, String) {
    let rules = Rules::parse(text).unwrap();
    named(&rules, kind, bytes)
}

fn named(rules: &Rules, kind: Kind, bytes: u64) -> (usize, String) {
    let (rule, specs) = rules.allowed(kind, rules.rule_for(kind, bytes), &Topology::flat(8));
    (rule, specs.iter().map(Spec::to_string).collect::<Vec<_>>().join(","))
}

#[test]
fn printed_rules_can_be_read_again() {
    for (text, printed) in [
        ("auto", "auto"),
        (" AUTO ", "auto"),
        ("Ring", "ring"),
        ("hips(along=ring,dims=2x4)", "hips(along=ring,dims=2x4)"),
        ("ring , circulant( radix = 4 )", "ring,circulant(radix=4)"),
        (
            "allreduce:0-64K=recursive_doubling; 64K-=^ring,^linear",
            "allreduce:0-64K=recursive-doubling; allreduce:64K-=^ring,^linear",
        ),
        ("0-1000=linear;1000-1GiB=auto", "0-1000=linear; 1000-1G=auto"),
        ("^halving_doubling", "^halving-doubling"),
        (
            "reducescatter=^direct; AllToAll:0-1K=Circulant",
            "reducescatter=^direct; alltoall:0-1K=circulant",
        ),
        ("Broadcast = chain; allreduce:1M- = ring", "broadcast=chain; allreduce:1M-=ring"),
    ] {
        assert_eq!(parsed(text), printed, "{text}");
        assert_eq!(parsed(printed), printed);
        assert_eq!(Rules::parse(text), Rules::parse(printed), "{text}");
    }
}

#[test]
fn a_rule_is_for_its_collective_and_its_range() {
    let text = "allreduce:0-64K=ring; 64K-1M=^ring,^linear; broadcast=chain";
    let usual = "ring,recursive-doubling,double-tree,hierarchical,circulant,linear";
    let some = "recursive-doubling,double-tree,hierarchical,circulant";
    for (kind, bytes, rule, specs) in [
        (Kind::Allreduce, 0, 1, "ring"),
        (Kind::Allreduce, 65_536, 1, "ring"),
        (Kind::Allreduce, 65_537, 2, some),
        (Kind::Allreduce, 1 << 20, 2, some),
        (Kind::Allreduce, (1 << 20) + 1, 0, usual),
        (BROADCAST, 65_536, 3, "chain"),
        (Kind::Reduce { root: 0 }, 65_536, 0, usual),
        (Kind::Move { from: 0, to: 1 }, 65_536, 0, usual),
    ] {
        assert_eq!(names(text, kind, bytes), (rule, specs.to_owned()), "{kind:?} {bytes}");
    }
    assert_eq!(names("chain", Kind::Reduce { root: 1 }, 5), (0, "chain".to_owned()));
    assert_eq!(names("0-9=chain; 9-=ring", BROADCAST, 10), (2, "ring".to_owned()));
}

/// A process set may have another number of nodes than the rules are for.
#[test]
fn specs_that_do_not_fit_are_left_out() {
    let rules = Rules::parse("allreduce=torus(dims=2x4),ring; broadcast=torus(dims=2x4)");
    let rules = rules.unwrap();
    assert_eq!(rules.fits(8), Ok(()));
    let error = rules.fits(6).unwrap_err().to_string();
    let said = "rule 1, character 11: torus(dims=2x4) is for 8 nodes, and there are 6; use dims \
                whose product is 6, such as 3x2";
    assert_eq!(error, said);
    let second = Rules::parse("allreduce:0-64K=ring;64K-=ring,torus(dims=3x3)").unwrap();
    let error = second.fits(8).unwrap_err();
    let (before, _) =
        second.to_string().split_once("torus").map(|(a, b)| (a.len(), b.len())).unwrap();
    assert_eq!((error.rule, error.at), (2, before + 1), "{error} in {second}");
    let single = Rules::parse("ring,torus(dims=3x3)").unwrap().fits(8).unwrap_err().to_string();
    assert!(single.starts_with("character 6: torus(dims=3x3) is for 9 nodes"), "{single}");
    assert_eq!(
        rules.allowed(Kind::Allreduce, 1, &Topology::flat(6)),
        (1, vec![Algorithm::Ring.into()])
    );
    let of = |nodes| rules.allowed(BROADCAST, 2, &Topology::flat(nodes)).0;
    assert_eq!((of(6), of(8)), (0, 2));
    assert_eq!((rules.forced(1, 8), rules.forced(2, 6), rules.forced(0, 8)), (None, None, None));
    assert_eq!(rules.forced(2, 8).unwrap().to_string(), "torus(dims=2x4)");
}

/// SAME: where something is reduced, only the canonical order of additions.
#[test]
fn strict_rules_allow_one_order_of_additions() {
    let canonical = "recursive-doubling,halving-doubling,rabenseifner";
    let usual = "ring,recursive-doubling,double-tree,hierarchical,circulant,linear";
    let reduce = Kind::Reduce { root: 1 };
    for (text, kind, rule, specs) in [
        ("auto", Kind::Allreduce, 0, canonical),
        ("auto", reduce, 0, canonical),
        ("auto", BROADCAST, 0, usual),
        ("auto", Kind::ReduceScatter, 0, canonical),
        ("auto", Kind::Alltoall, 0, "direct,circulant,hierarchical,ring"),
        ("^ring", Kind::Allreduce, 0, canonical),
        ("^recursive-doubling", reduce, 0, "halving-doubling,rabenseifner"),
        ("64K-=auto; 0-64K=^rabenseifner", reduce, 2, "recursive-doubling,halving-doubling"),
        (usual, Kind::Allreduce, 0, "recursive-doubling"),
        ("^ring", BROADCAST, 0, "recursive-doubling,double-tree,hierarchical,circulant,linear"),
        ("ring,rabenseifner", reduce, 0, "rabenseifner"),
        ("ring,rabenseifner", BROADCAST, 0, "ring,rabenseifner"),
        ("broadcast=chain", BROADCAST, 1, "chain"),
        ("broadcast=chain", Kind::Allreduce, 0, canonical),
        ("0-9=halving-doubling; 9-=auto", Kind::Allreduce, 2, canonical),
    ] {
        let rules = Rules::parse(text).unwrap().strict().unwrap();
        assert_eq!(named(&rules, kind, 4096), (rule, specs.to_owned()), "{text}, {kind:?}");
    }
    let only = "negotiation.strict allows only recursive-doubling, halving-doubling, \
                rabenseifner for reductions, and ";
    for (text, what) in [
        ("ring", "this list allows none of them"),
        ("^recursive-doubling,^halving-doubling,^rabenseifner", "this list allows none of them"),
        ("allreduce=ring", "rule 1 allows none of them"),
        ("broadcast=chain; reduce:0-9=auto; reduce:9-=chain", "rule 3 allows none of them"),
    ] {
        let error = Rules::parse(text).unwrap().strict().unwrap_err();
        assert_eq!(error.to_string(), format!("{only}{what}"), "{text}");
    }
}

/// Quantized pieces have two algorithms, if a rule allows them. Other collectives are not affected.
#[test]
fn quantized_rules_allow_two_algorithms() {
    let both = "direct,hierarchical";
    let (reduce, usual) = (Kind::Reduce { root: 0 }, "recursive-doubling");
    for (text, kind, rule, specs, excludes) in [
        ("auto", Kind::Allreduce, 0, both, false),
        ("ring", Kind::Allreduce, 0, both, true),
        ("ring,direct", Kind::Allreduce, 0, "direct", false),
        ("^direct", Kind::Allreduce, 0, "hierarchical", false),
        ("^direct,^hierarchical", Kind::Allreduce, 0, both, true),
        ("allreduce=ring", Kind::Allreduce, 0, both, false),
        ("0-64K=direct; 64K-=ring", Kind::Allreduce, 1, "direct", false),
        (usual, reduce, 0, usual, true),
    ] {
        let rules = Rules::parse(text).unwrap();
        assert_eq!(rules.excludes_quantized(), excludes, "{text}");
        let rules = rules.quantized();
        assert_eq!(named(&rules, kind, 4096), (rule, specs.to_owned()), "{text}, {kind:?}");
        let forced = rules.forced(1, 4);
        assert!(forced.is_none_or(|only| specs == only.to_string()), "{text}: {forced:?}");
    }
}

/// TRUST: a mistake is named with its rule, its place and what is accepted.
#[test]
fn a_mistake_is_named_with_its_place() {
    for (text, expected) in [
        ("rng", "unknown algorithm \"rng\"; use one of ring, recursive-doubling"),
        ("", "unknown algorithm \"\""),
        ("allreduce:0-64K", "\"allreduce:0-64K\" has no list; a rule is COLLECTIVE:RANGE=LIST"),
        ("ring,chain(radix)", "character 6: \"chain(radix)\" is not of the form"),
        ("allreduce:0-64K=rng", "rule 1, character 17: unknown algorithm \"rng\""),
        ("ring; broadcast=chain; 5-=", "rule 2, character 7: its range overlaps that of rule 1"),
        ("broadcast=chain;", "rule 2, character 17: unknown algorithm \"\""),
        ("barrier=ring", "rule 1, character 1: \"barrier\" is not a collective"),
        ("alltoall=^direct,^circulant,^hierarchical,^ring", "character 10: the list excludes"),
        ("^direct,^circulant,^hierarchical,^ring", "the list excludes all of direct, circulant"),
        ("allreduce:0-64Q=ring", "rule 1, character 11: invalid range of bytes \"0-64Q\""),
        ("64K=ring", "invalid range of bytes \"64K\"; use 0-64K, 64K-1M or 1M-"),
        ("allreduce:=ring", "invalid range of bytes \"\""),
        ("9-9=ring", "invalid range of bytes"),
        ("0-99999999999999999999=ring", "invalid range of bytes"),
        ("99999999999G-=ring", "invalid range of bytes"),
        ("0=ring", "invalid range of bytes \"0\""),
        ("0-9=ring; 8-=ring", "rule 2, character 11: its range overlaps that of rule 1"),
        ("allreduce=ring; 8-=ring", "its range overlaps that of rule 1"),
        ("broadcast=ring,^chain", "character 16: a list either names"),
        ("^ring(way=around)", "^ takes an algorithm without parameters"),
        (
            "^ring,^recursive-doubling,^double-tree,^hierarchical,^circulant,^linear",
            "the list excludes all of",
        ),
        ("allreduce=circulant(radix=1)", "radix is a number from 2 to"),
        ("allreduce=ring,auto", "unknown algorithm \"auto\""),
        ("é=ring", "rule 1, character 1: \"é\" is not a collective"),
        ("(=)", "unknown algorithm"),
    ] {
        let error = parsed(text);
        assert!(error.starts_with("error: ") && error.contains(expected), "{text}: {error}");
    }
    // As printed, each rule names its collective.
    let specs = "recursive-doubling,double-tree,hierarchical,linear";
    let many: Vec<String> = (0..MAX_RULES).map(|at| format!("{at}-{}={specs}", at + 1)).collect();
    let many = format!("allreduce:{}", many.join(";"));
    assert!(many.len() < MAX_TEXT);
    for long in ["ring;".repeat(MAX_RULES), "x".repeat(MAX_TEXT + 1), many] {
        assert!(parsed(&long).contains("at most 64 rules"));
    }
    let name = "x".repeat(MAX_TEXT - 8);
    for long in [name.clone(), format!("{name}=ring"), format!("{name}:0-=5")] {
        assert!(parsed(&long).len() < 1000);
    }
}

proptest::proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "[a-z0-9:;=,^()é -]{0,60}") {
        if let Ok(rules) = Rules::parse(&text) {
            proptest::prop_assert_eq!(Rules::parse(&rules.to_string()), Ok(rules));
        }
    }
}
