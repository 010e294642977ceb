"""The search for registers that are read and were not written, and for traps, on machine code written for it."""

from __future__ import annotations

from tests.machine_code import is_trap, unwritten_reads

# A loop of two branches; the second multiplies with an address that the first alone has computed.
FAULTY = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UMOV UR36, 0x10 ;
        /*0020*/                   UMOV UR37, 0x40 ;
        /*0030*/                   UMOV UR38, 0x20 ;
        /*0040*/                   UMOV UR39, 0x40 ;
        /*0050*/               @P1 BRA 0x90 ;
        /*0060*/                   UIADD3.64 UR32, UR36, 0x2, URZ ;
        /*0070*/                   HGMMA.64x32x16.F32.BF16 R40, gdesc[UR36], RZ, !UPT ;
        /*0080*/                   BRA 0xa0 ;
        /*0090*/                   {address} ;
        /*00a0*/                   LDG.E R2, desc[UR4][R24.64] ;
        /*00b0*/               @P2 BRA 0x50 ;
        /*00c0*/                   EXIT ;
"""


def test_what_one_branch_alone_has_written_is_found() -> None:
    assert unwritten_reads(FAULTY.format(address="UIADD3.64 UR12, UR32, 0x2, URZ")) == ["UIADD3.64 UR12, UR32, 0x2, URZ"]
    assert unwritten_reads(FAULTY.format(address="UIADD3.64 UR32, UR36, 0x2, URZ")) == []


def test_of_a_factor_in_registers_no_address_is_read() -> None:
    assert unwritten_reads(FAULTY.format(address="HGMMA.64x32x16.F32.BF16 R40, R28, gdesc[UR36], R40")) == []
    in_place = "HGMMA.64x32x16.F32.BF16 R40, R28, gdesc[UR34], R40"
    assert unwritten_reads(FAULTY.format(address=in_place)) == []
    assert unwritten_reads(FAULTY.format(address=in_place.replace("R28, ", ""))) == [in_place.replace("R28, ", "")]


TRAP = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   BPT.TRAP 0x1 ;
        /*0020*/                   BRA 0x20;
"""
CHECKED = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/               @P0 BRA 0x30 ;
        /*0020*/                   BPT.TRAP 0x1 ;
        /*0030*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0040*/                   EXIT ;
"""


def test_a_trap_and_nothing_else_is_found() -> None:
    assert is_trap(TRAP)
    assert not is_trap(CHECKED)
    assert not is_trap(FAULTY.format(address="UIADD3.64 UR32, UR36, 0x2, URZ"))
