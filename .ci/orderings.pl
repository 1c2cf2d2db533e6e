# Makes each memory ordering of the engine one that `ONCEKEY_WEAK=NUMBER` in the environment turns
# into Relaxed (a fence: into nothing): `perl orderings.pl TREE`. Prints the sites, a line for each:
# number, file, line, function, code. Only for the models: the real sources are not touched.
use strict;
use warnings;

my ($tree) = @ARGV;
my @files = qw(index/mod index/table index/spill record/cell record/slab engine/mod engine/settle
    engine/operate engine/sweep reclaim waiters/mod);
my $number = 0;
for my $file (map { "src/$_.rs" } @files) {
    open(my $in, '<', "$tree/$file") or die "$file: $!";
    my @lines = <$in>;
    my $above = '';
    my $function = '';
    my $line = 0;
    my $ours = 1;
    for (@lines) {
        $line++;
        $function = $1 if /\bfn (\w+)/;
        $ours = 0 if /^(pub )?mod (models|tests) \{/ || /pub\(crate\) fn (pass_over|begin_growth)/;
        $ours = 1 if $file =~ /slab|index/ && /^    \}$/;
        next if !$ours || m{^\s*//};
        my $code = $_ =~ s/^\s+|\s+$//gr;
        # An argument on a line of its own is told by the line above too.
        my $told = $code =~ /^Ordering::\w+,$/ ? "$above $code" : $code;
        my $part = 0;
        s{(fence\()?\bOrdering::(Acquire|Release|AcqRel|SeqCst)\b(\))?}{
            $number++;
            $part++;
            my $which = $part > 1 ? " (the second)" : '';
            print "$number\t$file\t$line\t$function\t$told$which\n";
            $1 ? "crate::sync::weak_fence($number)"
               : "crate::sync::weak($number, Ordering::$2)" . ($3 // '');
        }ge;
        $above = $code;
    }
    open(my $out, '>', "$tree/$file") or die "$file: $!";
    print $out @lines;
    close($out) or die "$file: $!";
}

# The two fences that stand in `sync` itself.
open(my $in, '<', "$tree/src/sync.rs") or die "sync: $!";
my $sync = do { local $/ = undef; <$in> };
for my $name (qw(fence_after_seq_cst_change between_seq_cst)) {
    $number++;
    print "$number\tsrc/sync.rs\t0\t$name\tfence(Ordering::SeqCst)\n";
    $sync =~ s/(fn $name\(\) \{[^}]*?(?:else \{\s*)?)\bfence\(Ordering::SeqCst\)/$1crate::sync::weak_fence($number)/
        or $sync =~ s/(fn $name\(\) \{.*?\belse \{\s*)fence\(Ordering::SeqCst\)/$1crate::sync::weak_fence($number)/s
        or die "sync: no $name";
}
$sync .= <<'RUST';

fn is_weak(number: usize) -> bool {
    static WEAK: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let read = || std::env::var("ONCEKEY_WEAK").ok().and_then(|number| number.parse().ok());
    *WEAK.get_or_init(|| read().unwrap_or(0)) == number
}

pub(crate) fn weak(number: usize, ordering: Ordering) -> Ordering {
    if is_weak(number) { Ordering::Relaxed } else { ordering }
}

#[allow(dead_code)]
pub(crate) fn weak_fence(number: usize) {
    if !is_weak(number) {
        fence(Ordering::SeqCst);
    }
}
RUST
open(my $out, '>', "$tree/src/sync.rs") or die "sync: $!";
print $out $sync;
close($out) or die "sync: $!";
